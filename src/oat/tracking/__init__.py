"""Where rows of metrics go: the run's own files (`files.py`), and sinks: TensorBoard, Weights & Biases,
MLflow, or a class of a user's.

Each sink lives in a process of its own (`process.py`), which `child.py` starts, feeds and ends: it may hang,
crash or say what it likes, and training neither waits for it nor sees it. `sinks.py` has their options.
"""
