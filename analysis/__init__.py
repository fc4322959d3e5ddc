"""From run directories to tables, statistics, figures and a report. Imports of this project: otb.records alone."""
