"""How text, figures and pages are made, whatever they show."""
