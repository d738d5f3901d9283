"""The backends: one file each, four verbs, chosen in `pick`. Kernels know nothing of modes or momentum."""
