"""`specdec chat`: a conversation, its commands, the lines that are typed, and what is shown."""
