//! Requests to the apiserver, tried again where that is safe.

use kube::client::ClientBuilder;
use kube::core::response::Status;
use kube::{Client, Config};
use std::future::Future;
use std::num::NonZeroU32;
use std::time::Duration;
use tower::limit::RateLimitLayer;

/// The first pause before a request is sent again.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// The longest.
const LAST_PAUSE: Duration = Duration::from_secs(10);

/// A client of the cluster of this pod, else of `$KUBECONFIG`, that sends no more requests a second than are named.
///
/// # Errors
/// If no cluster can be found.
pub async fn connect(most: Option<NonZeroU32>) -> Result<Client, String> {
    let config = Config::infer().await.map_err(|e| e.to_string())?;
    let builder = ClientBuilder::try_from(config).map_err(|e| e.to_string())?;
    Ok(match most {
        Some(most) => builder.with_layer(&RateLimitLayer::new(u64::from(most.get()), Duration::from_secs(1))).build(),
        None => builder.build(),
    })
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
