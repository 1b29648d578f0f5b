//! What a registry asks of who pushes: nothing, a password, or a token that it gives for one.
//!
//! The password is the one of `docker login` or `podman login`, in their file. Programs that keep passwords for them
//! (`credsStore`) are not asked.

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use std::path::PathBuf;
use ureq::http::{Response, StatusCode, header};
use ureq::{Body, RequestBuilder};

/// How this registry is spoken to for one repository.
pub(crate) struct Login {
    /// User and password, as the file has them: in base64.
    password: Option<String>,
    repository: String,
    word: Word,
}

/// What a request says of who sends it; nothing at first.
#[derive(Clone, Debug, Default)]
pub(crate) struct Word(Option<String>);

impl Word {
    /// Says it.
    pub(crate) fn on<B>(&self, request: RequestBuilder<B>) -> RequestBuilder<B> {
        match &self.0 {
            Some(word) => request.header(header::AUTHORIZATION, word),
            None => request,
        }
    }
}

impl Login {
    /// What is known of a registry before it is asked.
    pub(crate) fn of(host: &str, repository: &str) -> Login {
        let files = files().into_iter().filter_map(|path| std::fs::read_to_string(path).ok());
        let password = files.into_iter().find_map(|text| password(&text, host));
        Login { password, repository: repository.to_owned(), word: Word::default() }
    }

    /// The word that the registry took last.
    pub(crate) fn word(&self) -> &Word {
        &self.word
    }

    /// Sends a request; if the registry wants to know who sends it, once more with the answer.
    pub(crate) fn send(
        &mut self,
        mut request: impl FnMut(&Word) -> Result<Response<Body>, ureq::Error>,
    ) -> Result<Response<Body>> {
        let answer = request(&self.word)?;
        if answer.status() != StatusCode::UNAUTHORIZED {
            return Ok(answer);
        }
        let Some(asked) = answer.headers().get(header::WWW_AUTHENTICATE) else { return Ok(answer) };
        let asked = asked.to_str().context("the registry asks for no login that is known")?.to_owned();
        self.word = self.answer(&asked)?;
        Ok(request(&self.word)?)
    }

    fn answer(&self, asked: &str) -> Result<Word> {
        let (scheme, parameters) = asked.split_once(' ').unwrap_or((asked, ""));
        let basic = Word(self.password.as_ref().map(|password| format!("Basic {password}")));
        if scheme.eq_ignore_ascii_case("basic") {
            return Ok(basic);
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            bail!("the registry asks for the login `{scheme}`, which is not known; push an archive with another tool");
        }
        let realm = parameter(parameters, "realm").context("the registry says not where its tokens come from")?;
        let mut ask = ureq::get(realm).query("scope", format!("repository:{}:pull,push", self.repository));
        if let Some(service) = parameter(parameters, "service") {
            ask = ask.query("service", service);
        }
        let mut answer = basic.on(ask).call().with_context(|| format!("a token of {realm}"))?;
        let answer: Value = serde_json::from_str(&answer.body_mut().read_to_string()?)?;
        let token = answer["token"].as_str().or(answer["access_token"].as_str());
        Ok(Word(Some(format!("Bearer {}", token.with_context(|| format!("{realm} gave no token"))?))))
    }
}

/// The files in which passwords are kept.
fn files() -> Vec<PathBuf> {
    let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    [
        var("REGISTRY_AUTH_FILE"),
        var("DOCKER_CONFIG").map(|folder| folder.join("config.json")),
        var("XDG_RUNTIME_DIR").map(|folder| folder.join("containers/auth.json")),
        var("HOME").map(|home| home.join(".docker/config.json")),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// The password for a registry in such a file.
fn password(text: &str, host: &str) -> Option<String> {
    let file: Value = serde_json::from_str(text).ok()?;
    Some(file["auths"][host]["auth"].as_str().filter(|auth| !auth.is_empty())?.to_owned())
}

/// A parameter of a challenge: `name="value"`.
fn parameter<'a>(parameters: &'a str, name: &str) -> Option<&'a str> {
    let at = parameters.match_indices(name).map(|(at, _)| at).find(|at| {
        let before = parameters[..*at].trim_end();
        before.is_empty() || before.ends_with(',')
    })?;
    parameters[at + name.len()..].strip_prefix("=\"")?.split('"').next()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::net::TcpListener;

    #[test]
    fn a_challenge_is_read() {
        let asked = r#"realm="https://auth.example/token",service="registry.example",scope="repository:a:pull,push""#;
        assert_eq!(parameter(asked, "realm"), Some("https://auth.example/token"));
        assert_eq!(parameter(asked, "service"), Some("registry.example"));
        assert_eq!(parameter(asked, "pull"), None);
        assert_eq!(parameter(r#"my-realm="x", realm="y""#, "realm"), Some("y"));
    }

    /// Answers requests, one connection each, and hands on their heads.
    fn answering(answers: Vec<String>) -> (String, std::thread::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let at = address.clone();
        let thread = std::thread::spawn(move || {
            let one = |answer: String| {
                let (stream, _) = listener.accept().unwrap();
                let lines = BufReader::new(&stream).lines().map_while(Result::ok);
                let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
                (&stream).write_all(answer.replace("ADDRESS", &at).as_bytes()).unwrap();
                head.join("\n")
            };
            answers.into_iter().map(one).collect()
        });
        (address, thread)
    }

    #[test]
    fn a_token_is_fetched_with_the_password_and_used_from_then_on() {
        let answer = |status: &str, headers: &str, body: &str| {
            let length = body.len();
            format!("HTTP/1.1 {status}\r\n{headers}Content-Length: {length}\r\nConnection: close\r\n\r\n{body}")
        };
        let asks = "WWW-Authenticate: Bearer realm=\"http://ADDRESS/token\",service=\"registry.example\"\r\n";
        let (address, thread) = answering(vec![
            answer("401 Unauthorized", asks, ""),
            answer("200 OK", "", r#"{"token": "abc"}"#),
            answer("202 Accepted", "", ""),
        ]);
        let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
        let mut login = Login { password: Some("YTpi".into()), repository: "team/a".into(), word: Word::default() };
        let url = format!("http://{address}/v2/team/a/blobs/uploads/");
        let answer = login.send(|word| word.on(agent.post(&url)).send_empty()).unwrap();
        assert_eq!(answer.status(), StatusCode::ACCEPTED);
        assert_eq!(login.word.0.as_deref(), Some("Bearer abc"));
        let asked = thread.join().unwrap();
        assert!(!asked[0].contains("uthorization"), "{}", asked[0]);
        assert!(asked[1].starts_with("GET /token?") && asked[1].contains("service=registry.example"), "{}", asked[1]);
        assert!(asked[1].contains("team") && asked[1].contains("push"), "{}", asked[1]);
        assert!(asked[1].to_lowercase().contains("authorization: basic ytpi"), "{}", asked[1]);
        assert!(asked[2].to_lowercase().contains("authorization: bearer abc"), "{}", asked[2]);
    }

    #[test]
    fn a_password_is_that_of_the_registry() {
        let file = r#"{"auths": {"registry.example": {"auth": "YTpi"}, "other.example": {"auth": ""}}}"#;
        assert_eq!(password(file, "registry.example").as_deref(), Some("YTpi"));
        assert_eq!(password(file, "other.example"), None);
        assert_eq!(password(file, "third.example"), None);
        assert_eq!(password("no json", "registry.example"), None);
    }
}
