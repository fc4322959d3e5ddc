"""The study of study: rows of finished runs, kept in committed csv files, become verdicts, figures and a page."""
