"""From run directories to tables and figures. Imports of this project: otb.records alone."""
