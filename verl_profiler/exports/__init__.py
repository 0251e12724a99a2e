"""Numbers of a run in the forms that other tools read.

prometheus  metrics, as text or for scraping
otel        spans, as OTLP in JSON or to a collector
jsonl       one document a call, for Elasticsearch and the like
"""
