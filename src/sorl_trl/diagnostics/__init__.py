"""Monitors a run: rules that detect collapse, and callbacks that apply them and draw the progress bar."""
