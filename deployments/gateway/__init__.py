"""The gateway as a whole: the HTTP APIs put together (app), and the Serve deployment that runs them (deployment)."""
