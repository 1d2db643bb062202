"""Prefect flows: the stages chained, scheduled, observed. No algorithm here."""
