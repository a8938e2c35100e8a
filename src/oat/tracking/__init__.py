"""The places of rows of metrics: the run's own files (`files.py`), and sinks: TensorBoard, Weights & Biases,
MLflow, or a user's class.

Each sink lives in a process of its own (`process.py`), which `child.py` starts, feeds and ends. It may hang,
crash or print, and training neither waits for it nor notices. `sinks.py` has the options of sinks.
"""
