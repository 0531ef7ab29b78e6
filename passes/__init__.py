"""Graph passes; see base.py for what a pass is and manager.py for the order."""
