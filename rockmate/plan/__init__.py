"""Plans: a schedule with what it promises, as data, as text for people, and as files."""
