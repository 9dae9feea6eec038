"""`specdec chat`: the conversation, its commands, line editing and display."""
