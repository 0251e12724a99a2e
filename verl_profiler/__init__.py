"""Where the time of a verl RL step goes: requests, turns, tools, workers and transfers."""
