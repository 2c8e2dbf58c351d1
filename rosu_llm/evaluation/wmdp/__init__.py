"""WMDP and MMLU through lm-evaluation-harness, ΔScore."""
