"""Reads timelines (docs/timeline.md): trace.py the files, summary.py what they say, text.py and plot.py show it.

Nothing here needs an engine. The files are written by core/engine/timeline_format.cc.
"""
