"""The schema's history, run by alembic when a database is opened. One module in versions/ per step, with a function
upgrade(), never edited once released."""
