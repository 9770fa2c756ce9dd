"""Shows how a run is going: the rules that tell a collapse, and the callbacks that apply them and draw the bar."""
