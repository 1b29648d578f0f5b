//! Takes away a pod of which nothing is to be saved, and waits until it is gone.
//!
//! Invariants: it is deleted by its uid, so that the next of its name is left alone; and a node that is down, whose
//! kubelet never says that the pod has ended, keeps it no longer than it is given, which is [`KUBELETS`].

use crate::api::insist;
use crate::site::PodRef;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Preconditions};
use kube::{Api, Client};
use std::time::Duration;
use tokio::time::Instant;

/// How long kubelet has to end a pod that is being deleted. After that its object is deleted without kubelet's word;
/// what may still run there, kubelet ends when it is back.
pub(crate) const KUBELETS: Duration = Duration::from_secs(60);

/// The first pause before a pod is looked at again: kubelet ends most within a second or two.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// The longest.
const LAST_PAUSE: Duration = Duration::from_secs(5);

/// Deletes a pod, and waits until it is gone. Kubelet has so long to end it.
pub(crate) async fn remove(client: &Client, pod: &PodRef, kubelets: Duration) {
    let api = Api::<Pod>::namespaced(client.clone(), &pod.namespace);
    let (begun, mut pause) = (Instant::now(), FIRST_PAUSE);
    let mut grace = 1;
    loop {
        let how = DeleteParams {
            grace_period_seconds: Some(grace),
            preconditions: Some(Preconditions { uid: Some(pod.uid.clone()), resource_version: None }),
            ..DeleteParams::default()
        };
        // It is gone, or another of its name is there by now.
        if insist(|| async { api.delete(&pod.name, &how).await.map(|_| ()) }).await.is_err() {
            return;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LAST_PAUSE);
        grace = u32::from(begun.elapsed() < kubelets);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{Method, Response, StatusCode};
    use kube::client::Body;
    use serde_json::{Value, json};
    use std::sync::{Arc, Mutex};

    /// An apiserver with one pod, of this uid, on a node that is down: it is gone with a grace of 0 alone.
    fn apiserver(uid: &'static str, asked: &Arc<Mutex<Vec<Value>>>) -> Client {
        let asked = asked.clone();
        let answer = tower::service_fn(move |request: http::Request<Body>| {
            let asked = asked.clone();
            async move {
                assert_eq!(
                    (request.method(), request.uri().path()),
                    (&Method::DELETE, "/api/v1/namespaces/nlp/pods/x")
                );
                let body = request.into_body().collect_bytes().await.expect("a body");
                let how: Value = serde_json::from_slice(&body).expect("JSON");
                let mut asked = asked.lock().expect("whole");
                let gone = asked.iter().any(|before| before["gracePeriodSeconds"] == 0);
                let (status, answer) = if gone {
                    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404, "message": "gone"});
                    (StatusCode::NOT_FOUND, status)
                } else if how["preconditions"]["uid"] != uid {
                    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 409, "message": "another"});
                    (StatusCode::CONFLICT, status)
                } else {
                    (StatusCode::OK, json!({"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "x"}}))
                };
                asked.push(how);
                let answer = Response::builder().status(status).body(Body::from(answer.to_string().into_bytes()));
                Ok::<_, std::convert::Infallible>(answer.expect("an answer"))
            }
        });
        Client::new(answer, "default")
    }

    async fn graces(uid: &'static str) -> Vec<Value> {
        let asked = Arc::default();
        let pod = PodRef { namespace: "nlp".into(), name: "x".into(), uid: "1".into() };
        remove(&apiserver(uid, &asked), &pod, Duration::ZERO).await;
        let asked = asked.lock().expect("whole");
        asked.iter().map(|how| how["gracePeriodSeconds"].clone()).collect()
    }

    #[tokio::test]
    async fn a_node_that_is_down_does_not_keep_a_pod() {
        assert_eq!(graces("1").await, [json!(1), json!(0), json!(0)]);
    }

    #[tokio::test]
    async fn another_pod_of_the_same_name_is_left_alone() {
        assert_eq!(graces("2").await, [json!(1)]);
    }
}
