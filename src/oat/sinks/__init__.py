"""Where the rows of a run also go, beside the files in its directory: TensorBoard, Weights & Biases, MLflow, or a class of a user's.

Each sink lives in a process of its own (`process.py`), which `child.py` starts, feeds and ends: it may hang, crash or say what it likes, and training
neither waits for it nor sees it. `registry.py` has their names and options.
"""
