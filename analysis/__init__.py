"""Turns run directories into tables, statistics, figures and a report. Of otb it imports records and errors alone."""
