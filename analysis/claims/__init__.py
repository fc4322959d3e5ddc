"""Decides the paper's claims C1 to C5 from runs and measurements, for the report on any runs and for the study."""
