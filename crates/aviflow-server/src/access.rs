//! Who asks, on whose behalf, and what he may.
//!
//! There are three ways in. Whoever holds the token of the control plane's own folder could read the store
//! too, so he may everything, and is believed about the user's name. Where there are [`Identities`], any
//! other token says by itself whose it is, and so does a certificate whose key the client has proven to have; each
//! request then needs the rights that `routes` names for it.
//!
//! Invariants: the user of an identity never comes from the client; a route that names no right is not
//! served to an identity; what cannot be asked now is refused and not allowed; who shows a certificate is whom it
//! names, or nobody: no token makes up for one that does not hold.

use crate::app::App;
use crate::auth::{Origin, host};
use crate::error::Failure;
use crate::names::NAMESPACE;
use crate::routes::{self, Needs};
use aviflow_api::crd::GROUP;
use aviflow_api::rights::{Identity, Right, Verb};
use aviflow_tls::CertificateDer;
use axum::extract::{FromRequestParts, MatchedPath, RawPathParams, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

/// Names the user on whose behalf the holder of the control plane's own token asks.
const USER_HEADER: &str = "x-aviflow-user";

/// Names the namespace in which a bare name means a job, and into which is submitted.
const NAMESPACE_HEADER: &str = "x-aviflow-namespace";

/// Who the holder of a token or of a certificate is and what he may, where others know it.
pub trait Identities: Send + Sync {
    /// Whose a token is; none if it is nobody's.
    fn authenticate<'a>(&'a self, token: &'a str) -> Asked<'a, Option<Arc<Identity>>>;

    /// Whose a certificate is, which is the first of these, with those above it; or why it is nobody's, as a sentence
    /// goes on after `the client certificate is refused: `.
    fn certified<'a>(&'a self, chain: &'a [CertificateDer<'static>]) -> Asked<'a, Result<Arc<Identity>, String>>;

    /// Whether he has a right.
    fn may<'a>(&'a self, identity: &'a Arc<Identity>, right: &'a Right) -> Asked<'a, bool>;
}

/// An answer of [`Identities`].
pub type Asked<'a, T> = Pin<Box<dyn Future<Output = Result<T, Unavailable>> + Send + 'a>>;

/// It cannot be asked now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct Unavailable {
    /// Why.
    pub why: String,
    /// What to do, where it does not pass by itself.
    pub help: Option<String>,
}

impl From<String> for Unavailable {
    /// What passes by itself.
    fn from(why: String) -> Unavailable {
        Unavailable { why, help: None }
    }
}

impl From<Unavailable> for Failure {
    fn from(Unavailable { why, help }: Unavailable) -> Failure {
        let message = format!("the cluster cannot be asked who you are and what you may: {why}");
        Failure::new(StatusCode::SERVICE_UNAVAILABLE, "identityUnavailable", message)
            .help(help.unwrap_or_else(|| "try again in a moment".to_owned()))
    }
}

/// On whose behalf a client asks, and where.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    pub(crate) user: String,
    /// The namespace of bare names and of submissions.
    pub(crate) namespace: String,
    /// None of who holds the control plane's own token.
    identity: Option<Arc<Identity>>,
}

impl Caller {
    /// Somebody for whom the cluster has asked already what he may.
    pub(crate) fn admitted(user: String, namespace: String) -> Caller {
        Caller { user, namespace, identity: None }
    }
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Caller, Failure> {
        let caller = parts.extensions.get::<Caller>().cloned();
        caller.ok_or_else(|| Failure::internal("a request came past the guard"))
    }
}

/// The user on whose behalf a client asks.
#[derive(Clone, Debug)]
pub(crate) struct User(pub(crate) String);

impl<S: Sync> FromRequestParts<S> for User {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<User, Failure> {
        Caller::from_request_parts(parts, state).await.map(|caller| User(caller.user))
    }
}

impl App {
    /// Whether a caller has a right.
    pub(crate) async fn may(&self, caller: &Caller, right: &Right) -> Result<bool, Failure> {
        match (&caller.identity, &self.parts.identities) {
            (None, _) => Ok(true),
            (Some(identity), Some(identities)) => Ok(identities.may(identity, right).await?),
            (Some(_), None) => Ok(false),
        }
    }

    /// Refuses who lacks a right.
    pub(crate) async fn needs(&self, caller: &Caller, right: &Right) -> Result<(), Failure> {
        if self.may(caller, right).await? {
            return Ok(());
        }
        let message = format!("`{}` may not {right}", caller.user);
        Err(Failure::new(StatusCode::FORBIDDEN, "forbidden", message).help(format!(
            "an administrator of the cluster gives it: the verb `{}` on `{}{}` of the group {GROUP}",
            right.verb.name(),
            right.resource,
            right.subresource.map(|s| format!("/{s}")).unwrap_or_default()
        )))
    }

    /// Whether a caller sees the jobs of a namespace in lists.
    pub(crate) async fn sees(&self, caller: &Caller, namespace: &str) -> Result<bool, Failure> {
        Ok(self.may(caller, &Right::jobs(Verb::List, None)).await?
            || self.may(caller, &Right::jobs(Verb::List, Some(namespace))).await?)
    }

    /// The namespaces whose jobs a list has; none means all.
    pub(crate) async fn visible(
        self: &Arc<App>,
        caller: &Caller,
        wanted: Option<String>,
    ) -> Result<Option<Vec<String>>, Failure> {
        if let Some(namespace) = wanted {
            if !self.may(caller, &Right::jobs(Verb::List, None)).await? {
                self.needs(caller, &Right::jobs(Verb::List, Some(&namespace))).await?;
            }
            return Ok(Some(vec![namespace]));
        }
        if self.may(caller, &Right::jobs(Verb::List, None)).await? {
            return Ok(None);
        }
        let app = self.clone();
        let all = crate::app::blocking(move || Ok(app.parts.reader.namespaces()?)).await?;
        let mut seen = Vec::new();
        for namespace in all {
            if self.may(caller, &Right::jobs(Verb::List, Some(&namespace))).await? {
                seen.push(namespace);
            }
        }
        Ok(Some(seen))
    }
}

/// Lets through who is known, has the rights that the route needs, and means this host.
pub(crate) async fn guard(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let (mut parts, body) = request.into_parts();
    match admit(&app, &mut parts).await {
        Ok(caller) => {
            parts.extensions.insert(caller);
            next.run(Request::from_parts(parts, body)).await
        }
        Err(failure) => {
            let challenge = failure.status == StatusCode::UNAUTHORIZED;
            let mut response = failure.into_response();
            if challenge {
                response.headers_mut().insert(header::WWW_AUTHENTICATE, header::HeaderValue::from_static("Bearer"));
            }
            response
        }
    }
}

async fn admit(app: &App, parts: &mut Parts) -> Result<Caller, Failure> {
    host(app, &parts.headers)?;
    let from = Origin::from_request_parts(parts, &()).await?;
    let identity = identity(app, &parts.headers, &from).await?;
    let user = match &identity {
        Some(identity) => identity.user.clone(),
        None => said_user(&parts.headers)?,
    };
    let caller = Caller { user, namespace: namespace(app, &parts.headers)?, identity };
    if caller.identity.is_some() {
        for right in rights(parts, &caller).await? {
            app.needs(&caller, &right).await?;
        }
    }
    Ok(caller)
}

/// Who asks; none is who holds the control plane's own token.
async fn identity(app: &App, headers: &HeaderMap, from: &Origin) -> Result<Option<Arc<Identity>>, Failure> {
    let refused = |message: &str| Failure::new(StatusCode::UNAUTHORIZED, "unauthorized", message);
    if let (Some(identities), false) = (&app.parts.identities, from.certificates.is_empty()) {
        return match identities.certified(&from.certificates).await? {
            Ok(identity) => Ok(Some(identity)),
            Err(why) => Err(refused(&format!("the client certificate is refused: {why}")).help(
                "show one with which the cluster's API server lets you in, or none and a token, such as `kubectl \
                 create token` makes",
            )),
        };
    }
    let given = headers.get(header::AUTHORIZATION).and_then(|h| h.to_str().ok());
    let token = given.and_then(|h| {
        let (scheme, token) = h.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
    });
    let Some(token) = token else {
        return Err(refused("the request carries no token").help("log in with `aviflow login`"));
    };
    let Some(identities) = &app.parts.identities else {
        return match app.parts.token.is(token) {
            true => Ok(None),
            false => Err(refused("the token is not the one of this control plane").help("log in with `aviflow login`")),
        };
    };
    // It never leaves the machine that has the folder.
    if from.here && app.parts.token.is(token) {
        return Ok(None);
    }
    match identities.authenticate(token).await? {
        Some(identity) => Ok(Some(identity)),
        None => Err(refused("the cluster does not know whose token this is, or it has expired").help(
            "log in with a new one, such as `kubectl create token` makes; the tokens of job pods are nobody's here",
        )),
    }
}

fn said_user(headers: &HeaderMap) -> Result<String, Failure> {
    let Some(value) = headers.get(USER_HEADER) else { return Ok("unknown".to_owned()) };
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"._-+@".contains(&b);
    match value.to_str() {
        Ok(name) if !name.is_empty() && name.len() <= 64 && name.bytes().all(plain) => Ok(name.to_owned()),
        _ => Err(Failure::bad(format!("the header {USER_HEADER} holds no user name"))
            .help("a user name has at most 64 letters, digits and `._-+@`")),
    }
}

fn namespace(app: &App, headers: &HeaderMap) -> Result<String, Failure> {
    let Some(value) = headers.get(NAMESPACE_HEADER) else { return Ok(NAMESPACE.to_owned()) };
    let namespace = value.to_str().unwrap_or_default();
    check_namespace(app, namespace)?;
    Ok(namespace.to_owned())
}

/// Whether there can be jobs in a namespace of this name.
pub(crate) fn check_namespace(app: &App, namespace: &str) -> Result<(), Failure> {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    let label = !namespace.is_empty()
        && namespace.len() <= 63
        && namespace.bytes().all(inner)
        && !namespace.starts_with('-')
        && !namespace.ends_with('-');
    if !label {
        return Err(Failure::bad(format!("`{namespace}` is no name of a namespace"))
            .help("it has at most 63 lower-case letters, digits and `-`, and `-` is neither first nor last"));
    }
    if app.parts.identities.is_none() && namespace != NAMESPACE {
        let message = format!("there is no namespace `{namespace}`: jobs of one machine are all in `{NAMESPACE}`");
        return Err(Failure::refused("noSuchNamespace", message)
            .help("leave the namespace out, or use a control plane of a cluster with `aviflow context use NAME`"));
    }
    Ok(())
}

/// The rights that a request needs before it is read; none for what answers that there is no such route.
async fn rights(parts: &mut Parts, caller: &Caller) -> Result<Vec<Right>, Failure> {
    let Some(matched) = parts.extensions.get::<MatchedPath>().cloned() else { return Ok(Vec::new()) };
    let needs = routes::needs(matched.as_str(), &parts.method);
    let needs = needs.ok_or_else(|| routes::not_allowed(&parts.uri, &parts.method))?;
    let params = RawPathParams::from_request_parts(parts, &()).await.ok();
    let name = params.as_ref().and_then(|p| p.iter().find(|(key, _)| *key == "name")).map(|(_, value)| value);
    Ok(match needs {
        Needs::Known | Needs::Asked => Vec::new(),
        Needs::On(verb, resource) => vec![Right::on(verb, resource, None)],
        Needs::Named(verb, resource) => vec![Right::on(verb, resource, name.map(str::to_owned))],
        Needs::Jobs(verb) => vec![Right::jobs(verb, Some(namespace_of(name, caller)))],
        Needs::Part(verb, part) => vec![Right::part(verb, part, namespace_of(name, caller))],
        Needs::Told => crate::follow::rights(namespace_of(name, caller)),
    })
}

/// The namespace of the job that a name means.
pub(crate) fn namespace_of<'a>(name: Option<&'a str>, caller: &'a Caller) -> &'a str {
    name.and_then(|name| name.split_once('/')).map_or(&caller.namespace, |(namespace, _)| namespace)
}
