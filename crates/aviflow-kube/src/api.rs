//! Requests to the apiserver, tried again where that is safe, and watches, each after a pause.

use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use kube::client::ClientBuilder;
use kube::core::response::Status;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::utils::Backoff;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Config};
use std::collections::BTreeMap;
use std::future::Future;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tower::limit::RateLimitLayer;
use tower::util::MapResultLayer;

/// The first pause before a request is sent again.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// The longest.
const LAST_PAUSE: Duration = Duration::from_secs(10);

/// How long a watch lasts: some load balancers close a connection that is older than five minutes without a word.
const WATCH: u32 = 200;
/// The pause before a watch begins again: what happened meanwhile is not known here.
const AGAIN: Duration = Duration::from_secs(1);

/// Changes of objects, as they are seen.
pub(crate) type Watch<T> = BoxStream<'static, watcher::Result<Event<T>>>;

/// Watches all objects of a kind, or the one of this name. After an error it begins again by itself, once a pause is
/// over.
pub(crate) fn watch<T>(api: Api<T>, name: Option<&str>) -> Watch<T>
where
    T: kube::Resource + Clone + std::fmt::Debug + Send + serde::de::DeserializeOwned + 'static,
    T::DynamicType: Send + Sync,
{
    let config = watcher::Config::default().timeout(WATCH);
    let config = match name {
        Some(name) => config.fields(&format!("metadata.name={name}")),
        None => config,
    };
    watcher::watcher(api, config).backoff(Pause).boxed()
}

/// The pause of a watch after an error. It does not grow: a watch says that it begins before each try, which resets it.
struct Pause;

impl Iterator for Pause {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        Some(AGAIN)
    }
}

impl Backoff for Pause {
    fn reset(&mut self) {}
}

/// A client of the cluster of this pod, else of `$KUBECONFIG`, that sends no more requests a second than are named.
///
/// # Errors
/// If no cluster can be found.
pub async fn connect(most: Option<NonZeroU32>) -> Result<Client, String> {
    let config = Config::infer().await.map_err(|e| e.to_string())?;
    let builder = ClientBuilder::try_from(config).map_err(|e| e.to_string())?;
    let builder = builder.with_layer(&MapResultLayer::new(counted));
    Ok(match most {
        Some(most) => builder.with_layer(&RateLimitLayer::new(u64::from(most.get()), Duration::from_secs(1))).build(),
        None => builder.build(),
    })
}

/// Answers of apiservers to this process, by [`ANSWERS`].
static REQUESTS: [AtomicU64; ANSWERS.len()] = [const { AtomicU64::new(0) }; ANSWERS.len()];

/// Kinds of answers: their classes, and that there was none.
const ANSWERS: [&str; 6] = ["1xx", "2xx", "3xx", "4xx", "5xx", "error"];

/// Notes how a request was answered.
fn counted<B, E>(answer: Result<http::Response<B>, E>) -> Result<http::Response<B>, E> {
    let class = answer.as_ref().map_or(ANSWERS.len(), |answer| usize::from(answer.status().as_u16() / 100));
    let n = class.clamp(1, ANSWERS.len()) - 1;
    REQUESTS[n].fetch_add(1, Ordering::Relaxed);
    answer
}

/// Requests to apiservers since this process began, by how they were answered; a watch counts once.
#[must_use]
pub fn requests() -> BTreeMap<&'static str, u64> {
    ANSWERS.into_iter().zip(&REQUESTS).map(|(answer, n)| (answer, n.load(Ordering::Relaxed))).collect()
}

/// How long the apiserver may take to answer a request on which something waits.
pub(crate) const ANSWER: Duration = Duration::from_secs(10);

/// A request that is over, at the latest, when the apiserver has not answered for so long: a connection whose other
/// end is gone may say nothing for a quarter of an hour.
pub(crate) async fn within<T>(limit: Duration, request: impl Future<Output = kube::Result<T>>) -> kube::Result<T> {
    match tokio::time::timeout(limit, request).await {
        Ok(answered) => answered,
        Err(_) => Err(kube::Error::Service(format!("there was no answer within {limit:?}").into())),
    }
}

/// What the apiserver says that it will say again: another try is of no use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The HTTP status.
    pub code: u16,
    /// In its words.
    pub message: String,
}

impl Refused {
    /// Whether there is no such object.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        self.code == 404
    }

    /// Whether an object of that name is there already, or was changed meanwhile.
    #[must_use]
    pub fn is_conflict(&self) -> bool {
        self.code == 409
    }
}

/// Sends an idempotent request until the apiserver has answered it.
///
/// It may be away for a minute, or ask for patience (429, 5xx): what it was to do is still to be done then.
///
/// # Errors
/// With what the apiserver refuses for good.
pub async fn persist<T, F: Future<Output = kube::Result<T>>>(request: impl FnMut() -> F) -> Result<T, Refused> {
    until(request, |_| true).await
}

/// The same for what is to be done by nobody else, as the end of a pod: also a right that is missing is waited for.
/// An apiserver that has just started knows of no rights for a moment, and answers with 403.
///
/// # Errors
/// With what the apiserver refuses for good: there is no such object, or it is another by now.
pub(crate) async fn insist<T, F: Future<Output = kube::Result<T>>>(request: impl FnMut() -> F) -> Result<T, Refused> {
    until(request, |refused| !matches!(refused.code, 401 | 403)).await
}

async fn until<T, F: Future<Output = kube::Result<T>>>(
    mut request: impl FnMut() -> F,
    stays: impl Fn(&Refused) -> bool,
) -> Result<T, Refused> {
    let mut pause = FIRST_PAUSE;
    loop {
        match request().await {
            Ok(done) => return Ok(done),
            Err(e) => {
                if let Some(refused) = refusal(&e).filter(&stays) {
                    return Err(refused);
                }
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LAST_PAUSE);
    }
}

/// What of an error stays so.
pub(crate) fn refusal(error: &kube::Error) -> Option<Refused> {
    let kube::Error::Api(status) = error else { return None };
    let Status { code, message, .. } = &**status;
    let passes = *code == 429 || *code == 408 || *code >= 500;
    (!passes).then(|| Refused { code: *code, message: message.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::Pod;
    use kube::client::Body;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::time::Instant;

    #[tokio::test]
    async fn a_watch_pauses_while_the_apiserver_is_away() {
        let asked = Arc::<AtomicUsize>::default();
        let count = asked.clone();
        let away = tower::service_fn(move |_: http::Request<Body>| {
            count.fetch_add(1, Ordering::Relaxed);
            std::future::ready(Err::<http::Response<Body>, _>(std::io::Error::other("connection refused")))
        });
        let mut events = watch(Api::<Pod>::all(Client::new(away, "default")), None);
        let begun = Instant::now();
        let mut failed = 0;
        while failed < 2 {
            failed += usize::from(events.next().await.expect("it goes on").is_err());
        }
        assert!(begun.elapsed() >= AGAIN, "a pause between the two");
        assert_eq!(asked.load(Ordering::Relaxed), 2);
    }
}
