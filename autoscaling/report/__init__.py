"""Outcomes of simulations as numbers, a table, plots and a page."""
