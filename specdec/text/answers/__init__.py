"""Parse answers into thinking, text and tool calls, independent of how they are split into deltas."""
