"""What Alembic runs for every command. The connection and its transaction are the caller's."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], transactional_ddl=True)
context.run_migrations()
