"""Which gateway has which session."""


class GatewayManager:
    """A fake with one gateway."""

    async def create_session(self, session_id, **kwargs):
        return await self.gateways[0].create_session.remote(session_id=session_id, **kwargs)

    async def finalize_session(self, session_id):
        return await self.gateways[0].finalize_session.remote(session_id=session_id)

    async def abort_session(self, session_id):
        await self.gateways[0].abort_session.remote(session_id=session_id)
