"""A run's folder and those who look at it.

folder      create, read and extend a run · environment: the machine and versions it ran with
gates       what gates decide, written beside the metrics
progress    a bar while it trains · watch: the same from another terminal · trackers: TensorBoard, W&B, MLflow
"""
