"""Orchestration: Prefect flows, Ray actors and trainers, MLflow tracking and registry."""
