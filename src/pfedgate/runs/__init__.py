"""What a run leaves on disk, and what follows it: folder, gates, environment, progress, watch, trackers."""
