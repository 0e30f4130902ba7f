"""Files, streams, schemas: raw logs and Parquet in, batches of ids, dense numbers and labels out."""
