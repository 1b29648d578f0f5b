//! Channels into running jobs, and stacks.

use super::{Client, Lines, encode, job_path};
use crate::error::{Result, While};
use aviflow_api::rest::{AskStacks, ChannelFrame, ChannelInput, OpenChannel, Stacks, TakenStacks};
use std::time::Duration;
use ureq::SendBody;

/// How long a control plane has to take a sign of life.
const SIGN: Duration = Duration::from_secs(20);

impl Client {
    /// What the processes of a job are doing.
    pub fn stacks(&self, name: &str, asked: &AskStacks) -> Result<Stacks> {
        self.named(name, self.post(&job_path(name, "/stacks"), asked))
    }

    /// What they were doing when it last stood still.
    pub fn last_stacks(&self, name: &str) -> Result<TakenStacks> {
        self.named(name, self.get(&job_path(name, "/stacks"), &[]))
    }

    /// Opens a channel beside a rank.
    pub fn open_channel(&self, name: &str, asked: &OpenChannel) -> Result<Lines<ChannelFrame>> {
        let body = serde_json::to_vec(asked).or_fail(|| "the request cannot be written".to_owned())?;
        let response = self.send(
            self.agent.post(self.path(&job_path(name, "/channels"), &[])),
            "application/x-ndjson",
            "application/json",
            SendBody::from_owned_reader(std::io::Cursor::new(body)),
        );
        Ok(Lines::new(self.named(name, response)?, false))
    }

    /// Puts something into a channel; waits until there is room for it.
    pub fn put_channel(&self, name: &str, channel: &str, input: &ChannelInput) -> Result<()> {
        let body = serde_json::to_vec(input).or_fail(|| "the request cannot be written".to_owned())?;
        let path = self.path(&job_path(name, &format!("/channels/{}", encode(channel))), &[]);
        let request = self.agent.post(path);
        // Only what waits for nobody has a limit.
        let waits = !input.data.is_empty();
        let request = request.config().timeout_global((!waits).then_some(SIGN)).build();
        let body = SendBody::from_owned_reader(std::io::Cursor::new(body));
        self.send(request, "application/json", "application/json", body).map(drop)
    }
}
