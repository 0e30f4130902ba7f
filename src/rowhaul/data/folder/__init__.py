"""The data folder that `prepare` and `generate` write: Parquet parts, a schema and a manifest."""
