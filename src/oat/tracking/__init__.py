"""The places where rows of metrics are written: the run's own files (`files.py`), and sinks: TensorBoard,
Weights & Biases, MLflow, or a user's class.

Each sink runs in a process of its own (`process.py`). `child.py` starts this process, sends it rows, and ends
it. So a sink that hangs, crashes or prints does not stop training. `sinks.py` reads the options of sinks.
"""
