"""Numbers of a run in the forms that other tools read.

perfetto    a timeline of all processes
otlp        spans of TransferQueue calls, as OTLP in JSON or to a collector
prometheus  metrics, as text for a textfile collector
jsonl       one document a call, for Elasticsearch and the like
trackers    report and findings to W&B, TensorBoard or MLflow
"""
