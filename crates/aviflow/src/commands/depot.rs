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
use ureq::config::ConfigBuilder;
use ureq::typestate::AgentScope;

/// The pause before the depot is asked again.
const PAUSE: Duration = Duration::from_secs(1);

/// How long the depot may be silent; as it checks a layer, and writes it to its disk, before it answers.
const SILENT: Duration = Duration::from_secs(120);
/// How long it may take to be reached.
const REACH: Duration = Duration::from_secs(10);

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

/// How the depot is asked, where it may be silent for so long.
fn patient(silent: Duration) -> ConfigBuilder<AgentScope> {
    ureq::Agent::config_builder()
        .http_status_as_error(false)
        .timeout_connect(Some(REACH))
        .timeout_per_read(Some(silent))
        .timeout_per_write(Some(silent))
        .timeout_await_100(Some(silent))
}

impl Depot {
    /// The one that the pod is told of; without an authority it is spoken to plainly.
    pub(super) fn new(authority: Option<&str>) -> Result<Depot, Trouble> {
        let config = patient(SILENT);
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
            // Whoever is refused hears why, which he would not in the middle of sending.
            let request = self.agent.put(url).header("Authorization", token).header("Expect", "100-continue");
            request.send(File::open(from)?)
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
                    if lasts(answer.status().as_u16()) {
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

/// Whether an answer stays the same however often it is asked for: what is asked for is not to be had, or not for this
/// pod, or the layer has no room at the control plane.
fn lasts(status: u16) -> bool {
    matches!(status, 403 | 410 | 413 | 507)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_full_disk_is_not_asked_again_and_a_busy_one_is() {
        for status in [403, 410, 413, 507] {
            assert!(lasts(status), "{status}");
        }
        for status in [401, 404, 408, 500, 503] {
            assert!(!lasts(status), "{status}");
        }
    }

    #[test]
    fn a_depot_that_is_silent_is_given_up() {
        // It takes the connection, and never answers.
        let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}/lock", silent.local_addr().expect("an address"));
        let agent = patient(Duration::from_millis(1)).build().new_agent();
        let e = agent.get(url).call().expect_err("nobody answers");
        assert!(matches!(e, ureq::Error::Timeout(_)) || e.to_string().contains("timed out"), "{e}");
    }
}
