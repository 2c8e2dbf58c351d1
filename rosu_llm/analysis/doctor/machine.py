"""What is installed and what the machine has, told so that it can be shown to strangers."""

from __future__ import annotations

import getpass
import os
import platform
import re
import shutil
import socket
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

#: Extras for those who work on the package itself.
_INTERNAL = ("dev", "docs")
_PATH = re.compile(r"(?<![\w/.:-])~?/(?:[^\s/'\":;,()]+/)+([^\s/'\":;,()]*)")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")
_SECRET = re.compile(r"\b(?:hf|sk|ghp)_?[-A-Za-z0-9]{16,}|(?<=://)[^\s/@]+@")


def packages() -> list[dict[str, Any]]:
    """Each package that this one needs or can use: wanted and installed version, whether they fit, and its extra."""
    from packaging.requirements import Requirement

    try:
        texts = metadata.requires("rosu-llm") or []
    except metadata.PackageNotFoundError:
        return []
    found: dict[str, dict[str, Any]] = {}
    for requirement in map(Requirement, texts):
        extra = re.search(r"extra == ['\"](\w+)['\"]", str(requirement.marker or ""))
        if requirement.name in found or (extra and extra[1] in _INTERNAL):
            continue
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            installed = None
        fits = installed is not None and requirement.specifier.contains(installed, prereleases=True)
        found[requirement.name] = {
            "package": requirement.name,
            "wanted": str(requirement.specifier),
            "installed": installed,
            "fits": fits,
            "extra": extra[1] if extra else None,
        }
    return list(found.values())


def lacks(*wanted: str) -> str | None:
    """The first of these requirements that the environment does not meet."""
    from packaging.requirements import Requirement

    for requirement in map(Requirement, wanted):
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            return f"{requirement.name} is not installed"
        if not requirement.specifier.contains(installed, prereleases=True):
            return f"{requirement.name} {installed} does not fit {requirement}"
    return None


def machine() -> dict[str, Any]:
    """The machine without anything that names it or its user."""
    import torch

    version = torch.version
    built = [f"{name} {value}" for name in ("cuda", "hip", "xpu") if (value := getattr(version, name, None))]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch_built_for": ", ".join(built) or "cpu",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_free": free_memory(),
    }


def free_memory() -> int:
    """Bytes that this process may still take: the machine's, or what its container or job leaves."""
    import psutil

    return min(int(psutil.virtual_memory().available), *_job_limits())


def _job_limits() -> Iterator[int]:
    """What the control groups of this process leave, as batch systems and containers set them; nothing else does."""
    yield 1 << 62
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
        group = Path("/sys/fs/cgroup") / next(line[3:].lstrip("/") for line in lines if line.startswith("0::"))
        for folder in (group, *group.parents):
            limit = folder / "memory.max"
            if limit.is_file() and (text := limit.read_text().strip()).isdigit():
                yield max(0, int(text) - int((folder / "memory.current").read_text()))
    except (OSError, StopIteration, ValueError):
        return


def free_disk(folder: Path) -> int:
    """Bytes that can still be written below ``folder``, which may not exist yet."""
    return shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free


def anonymous(text: str) -> str:
    """The text without paths but for their last part, names of user and host, addresses and tokens."""
    home = os.path.expanduser("~")  # which is not known of every user, and may be the root
    text = _SECRET.sub("…", text)
    text = text.replace(home, "~") if len(home) > 1 else text
    text = _ADDRESS.sub("ADDRESS", _PATH.sub(r"…/\1", text))
    for name, instead in ((socket.gethostname(), "HOST"), (_user(), "USER")):
        if len(name) > 2:
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", instead, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no name for this number, as in containers
        return ""
