//! What containers of Aviflow's own image do in pods of others: they speak to the control plane's depot, and what they
//! say last is the reason that people read.

use crate::client::Security;
use aviflow_kube::depot::CONTENT;
use aviflow_kube::fate::LASTING;
use aviflow_kube::pod::{DEPOT, TOKEN};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// The pause before the depot is asked again.
const PAUSE: Duration = Duration::from_secs(1);

/// Tries to reach the depot: the control plane may be away for a while, and a start may take ten minutes.
const TRIES: u32 = 500;

/// Why it could not be done.
pub(super) enum Trouble {
    /// Another try may help.
    Passing(String),
    /// It will not.
    Lasting(String),
}

/// How a container ends: with [`LASTING`] it says that another try will not help.
pub(super) fn told(done: Result<(), Trouble>) -> ExitCode {
    let (reason, code) = match done {
        Ok(()) => return ExitCode::SUCCESS,
        Err(Trouble::Passing(reason)) => (reason, 1),
        Err(Trouble::Lasting(reason)) => (reason, LASTING),
    };
    let _ = writeln!(std::io::stderr(), "{reason}");
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

pub(super) fn variable(name: &str) -> Result<String, Trouble> {
    std::env::var(name).map_err(|_| Trouble::Lasting(format!("the pod lacks the variable {name}; please report this")))
}

/// The control plane's depot, which is known by its authority and by nothing else.
pub(super) struct Depot {
    address: String,
    agent: ureq::Agent,
}

impl Depot {
    /// The one that the pod is told of; without an authority it is spoken to plainly.
    pub(super) fn new(authority: Option<&str>) -> Result<Depot, Trouble> {
        let config = ureq::Agent::config_builder().http_status_as_error(false);
        let config = match authority {
            Some(pem) => {
                let security = Security::default().known("in the pod", pem).config();
                config.https_only(true).tls_config(security.map_err(|e| Trouble::Lasting(e.message))?)
            }
            None => config,
        };
        Ok(Depot { address: variable(DEPOT)?, agent: config.build().new_agent() })
    }

    /// Fetches what lies at a path; gives the SHA-256 that the depot says it has, if it does.
    pub(super) fn fetch(&self, at: &str, what: &str, to: &Path) -> Result<Option<String>, Trouble> {
        self.asked(at, &format!("gave no {what}"), |url, token| {
            let mut answer = self.agent.get(url).header("Authorization", token).call()?;
            if answer.status() == 200 {
                std::io::copy(&mut answer.body_mut().as_reader(), &mut File::create(to)?)?;
            }
            Ok(answer)
        })
    }

    /// Stores a file at a path.
    pub(super) fn store(&self, at: &str, what: &str, from: &Path) -> Result<(), Trouble> {
        let done = self.asked(at, &format!("took no {what}"), |url, token| {
            self.agent.put(url).header("Authorization", token).send(File::open(from)?)
        });
        done.map(|_| ())
    }

    /// Asks until there is an answer that stays so.
    fn asked(
        &self,
        at: &str,
        failed: &str,
        ask: impl Fn(&str, &str) -> Result<ureq::http::Response<ureq::Body>, ureq::Error>,
    ) -> Result<Option<String>, Trouble> {
        let url = format!("{}{at}", self.address);
        let mut last = String::new();
        for _ in 0..TRIES {
            let token = fs::read_to_string(TOKEN)
                .map_err(|e| Trouble::Passing(format!("the pod's token cannot be read at {TOKEN}: {e}")))?;
            match ask(&url, &format!("Bearer {}", token.trim())) {
                Ok(answer) if answer.status().is_success() => {
                    return Ok(answer.headers().get(CONTENT).and_then(|value| Some(value.to_str().ok()?.to_owned())));
                }
                Ok(mut answer) => {
                    let said = answer.body_mut().read_to_string().unwrap_or_default();
                    last = format!("the control plane {failed}: {}", said.trim());
                    if answer.status() == 410 || answer.status() == 403 {
                        return Err(Trouble::Lasting(last));
                    }
                }
                Err(e) => last = format!("the control plane {failed} at {url}: {e}"),
            }
            std::thread::sleep(PAUSE);
        }
        Err(Trouble::Passing(last))
    }
}
