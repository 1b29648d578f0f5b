//! What is posted. Pure.

use aviflow_api::spec::{Notify, NotifyFormat, NotifyOn};
use aviflow_api::webhook;
use serde::Serialize;
use serde_json::json;

/// A notification, as `docs/user/notifications.md` has it.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Message {
    /// The same again if it is told again, as after a crash; of no other.
    pub id: String,
    /// The word under which it was asked for.
    pub event: NotifyOn,
    /// When, in milliseconds since 1970.
    pub at: i64,
    /// The job's name.
    pub job: String,
    /// Its namespace.
    pub namespace: String,
    /// Who submitted it.
    pub user: String,
    /// Its queue.
    pub queue: String,
    /// The phase that it is in by this.
    pub phase: String,
    /// The attempt; 0 before the first.
    pub attempt: u32,
    /// What happened, in a sentence.
    pub what: String,
    /// Why, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What a person may do.
    pub next: String,
    /// A command that shows the job.
    pub look: String,
}

impl Message {
    /// What to do about it; `outputs` is the job's first folder of outputs.
    pub fn next(on: NotifyOn, name: &str, outputs: Option<&str>) -> String {
        match on {
            NotifyOn::Started => format!("`aviflow logs -f {name}` follows it"),
            NotifyOn::Restarted => format!("`aviflow show {name}` says what it resumed from and what was lost"),
            NotifyOn::Suspended => format!(
                "it waits in its old place, and `aviflow show {name}` says until when; `aviflow resume {name}` if a person suspended it"
            ),
            NotifyOn::Idle => format!(
                "`aviflow top {name}` and `aviflow stacks {name}` show what it does; `aviflow cancel {name}` frees its GPUs"
            ),
            NotifyOn::Failed => {
                format!("`aviflow logs {name}` has its last lines; `aviflow rerun {name}` runs it again")
            }
            NotifyOn::Succeeded => match outputs {
                Some(folder) => format!("`aviflow cp {name}:{folder} .` fetches its outputs"),
                None => format!("`aviflow show {name}` has its results"),
            },
            NotifyOn::EstimateSlipped => {
                format!("`aviflow show {name}` says who is in front and what would start it sooner")
            }
        }
    }

    /// The text that stands for everything.
    fn text(&self) -> String {
        let Message { namespace, job, user, queue, what, next, .. } = self;
        let why = self.reason.as_ref().map(|why| format!(" ({why})")).unwrap_or_default();
        let attempt = if self.attempt > 0 { format!(", attempt {}", self.attempt) } else { String::new() };
        format!("{namespace}/{job} of {user} in {queue}{attempt}: {what}{why}\n{next}")
    }

    /// The body for a receiver. A text is in every form.
    pub fn body(&self, to: &Notify) -> String {
        let chat = webhook::is_chat(webhook::host(&to.webhook));
        let slack = to.format.map_or(chat, |format| format == NotifyFormat::Slack);
        if slack {
            // Commands would be read as marks of Slack's where these three are.
            let text = self.text().replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
            return json!({"text": text}).to_string();
        }
        let mut whole = serde_json::to_value(self).unwrap_or_default();
        whole["text"] = self.text().into();
        whole.to_string()
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use serde_json::Value;

    pub fn message() -> Message {
        Message {
            id: "7-41".into(),
            event: NotifyOn::Restarted,
            at: 1_700_000_000_000,
            job: "llama".into(),
            namespace: "nlp".into(),
            user: "ada".into(),
            queue: "research".into(),
            phase: "Running".into(),
            attempt: 2,
            what: "all 16 ranks are up again".into(),
            reason: Some("rank 3 exited with 1 & no more".into()),
            next: Message::next(NotifyOn::Restarted, "nlp/llama", None),
            look: "aviflow show nlp/llama".into(),
        }
    }

    #[test]
    fn a_text_is_in_every_form_and_alone_for_chats() {
        let body = |webhook: &str, format: Option<NotifyFormat>| {
            let to = Notify { webhook: webhook.into(), on: Vec::new(), format };
            serde_json::from_str::<Value>(&message().body(&to)).expect("JSON")
        };
        let whole = body("https://chat.example/x", None);
        let text = "nlp/llama of ada in research, attempt 2: all 16 ranks are up again (rank 3 exited with 1 & no more)\n\
                    `aviflow show nlp/llama` says what it resumed from and what was lost";
        assert_eq!(
            whole,
            json!({
                "id": "7-41", "event": "restarted", "at": 1_700_000_000_000_i64, "job": "llama", "namespace": "nlp",
                "user": "ada", "queue": "research", "phase": "Running", "attempt": 2,
                "what": "all 16 ranks are up again", "reason": "rank 3 exited with 1 & no more",
                "next": "`aviflow show nlp/llama` says what it resumed from and what was lost",
                "look": "aviflow show nlp/llama", "text": text,
            })
        );
        let slack = json!({"text": text.replace('&', "&amp;")});
        assert_eq!(body("https://hooks.slack.com/services/x", None), slack);
        assert_eq!(body("https://chat.example/x", Some(NotifyFormat::Slack)), slack);
        assert_eq!(body("https://hooks.slack.com/services/x", Some(NotifyFormat::Json)), whole);
    }
}
