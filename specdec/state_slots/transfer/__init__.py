"""Plan which bytes an engine reads from another's memory: cut.py has a rank's layout, plan.py the copies."""
