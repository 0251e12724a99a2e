"""A session: made at a gateway, run by an agent, ended at the gateway."""

from uuid import uuid4


class OpenAICompatibleAgentFramework:
    """A fake that makes sessions as the real one does, and neither scores nor stores them."""

    async def _run_session(
        self,
        *,
        sample_fields,
        sample_index,
        session_index,
        global_steps,
        runner_name,
        runner_config,
        sampling_params,
    ):
        session_id = f"session-sample-{sample_index}-rollout-{session_index}-{uuid4().hex}"
        session = await self.gateway_manager.create_session(
            session_id, sampling_params=sampling_params
        )
        try:
            await self._inline_runners[runner_name](
                raw_prompt=sample_fields["raw_prompt"], session=session, sample_index=sample_index
            )
        except Exception:
            await self.gateway_manager.abort_session(session_id)
            raise
        return await self.gateway_manager.finalize_session(session_id), sample_fields
