"""One replica of a pool: the deployment that hosts an engine, and what it reports about itself."""
