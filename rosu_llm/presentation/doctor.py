"""``rosu doctor``'s examination as a section."""

from __future__ import annotations

from collections.abc import Iterable

from ..analysis.doctor.examine import AGREES, DoctorDocument
from .blocks import MISSING, Block, Missing, Section, Table, Text, shown, text_table


def doctor_section(document: DoctorDocument) -> Section:
    """The verdict, then what it rests on."""
    blocks: list[Block] = [Text(document["verdict"], strong=True), *map(Text, document["problems"])]
    blocks += [_layouts(document), *_needs(document), _machine(document), _packages(document)]
    return Section("doctor", "rosu doctor", blocks)


def _layouts(document: DoctorDocument) -> Table:
    rows = [
        (row["name"], row["state"], shown(row.get("difference"), 2), shown(row.get("seconds"), 3), row["why"])
        for row in document["rows"]
    ]
    note = (
        f"{document['steps']} steps of a tiny Llama on {document['processes']} process(es) over {document['backend']}; "
        f"difference to one process: ‖w − w_ref‖/‖w_ref − w₀‖, {AGREES} up to {document['limit']:g}. "
        "The first row's seconds include imports."
    )
    return text_table("", ("layout", "state", "difference", "seconds", "why"), rows, notes=(note,))


def _needs(document: DoctorDocument) -> Iterable[Block]:
    needs = document["needs"]
    if needs is None:
        return
    rows = [
        (each["name"], gib(each["memory"]), gib(each["free"]), "yes" if each["memory"] <= each["free"] else "NO")
        for each in needs["layouts"]
    ]
    free = document["machine"]["disk_free"]
    rows.append(("disk", gib(needs["disk"]), gib(free), "yes" if needs["disk"] <= free else "NO"))
    note = f"{needs['model']}: memory per process without activations; disk for the model and its checkpoints."
    yield text_table("", ("recipe", "needs", "free", "fits"), rows, notes=(note,))


def _machine(document: DoctorDocument) -> Table:
    about = document["machine"]
    rows = [
        ("rosu-llm", document["version"]),
        ("system", f"{about['system']}, {about['cores']} cores, {gib(about['memory_free'])} of memory free"),
        ("python", about["python"]),
        ("torch built for", about["torch_built_for"]),
        ("disk", f"{gib(about['disk_free'])} free"),
    ]
    for at, device in enumerate(document["devices"]):
        memory = f", {gib(device['free'])} of {gib(device['total'])} free" if "free" in device else ""
        rows.append((f"process {at}", f"{device['device']}{memory}"))
    return text_table("", ("machine", ""), rows)


def _packages(document: DoctorDocument) -> Block:
    if not document["packages"]:
        return Missing("rosu-llm is not installed as a package: there are no bounds to compare versions with.")
    rows = []
    for each in document["packages"]:
        extra = f" (rosu-llm[{each['extra']}])" if each["extra"] else ""
        state = "yes" if each["fits"] else "no" if each["installed"] else "not installed"
        rows.append((each["package"] + extra, each["wanted"] or MISSING, each["installed"] or MISSING, state))
    return text_table("", ("package", "wanted", "installed", "fits"), rows)


def gib(size: int) -> str:
    """Bytes in a readable unit."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"
