"""The places where rows of metrics are written: the run's own files (`files.py`), and sinks: TensorBoard,
Weights & Biases, MLflow, or a user's class.

Each sink runs in a process of its own (`process.py`), which `child.py` starts, feeds and ends. A sink may
hang, crash or print without holding up training. `sinks.py` reads the options of sinks.
"""
