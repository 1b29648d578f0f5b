//! What goes wrong, as a status and a body that says what to do next.

use crate::body::Unresolved;
use crate::view::priority_name;
use aviflow_api::file::Priorities;
use aviflow_api::rest::{ApiError, MissingObjects};
use aviflow_api::secrets::mask;
use aviflow_engine::driver::HandleError;
use aviflow_engine::engine::Refusal;
use aviflow_engine::ports::StoreError;
use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

/// A request that was not carried out.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) status: StatusCode,
    pub(crate) error: ApiError,
    missing: Vec<String>,
}

impl Failure {
    pub(crate) fn new(status: StatusCode, code: &str, message: impl Into<String>) -> Failure {
        Failure { status, error: ApiError::new(code, message), missing: Vec::new() }
    }

    /// What happened and what to do, in one line.
    pub(crate) fn sentence(&self) -> String {
        let message = &self.error.message;
        self.error.help.as_ref().map_or_else(|| message.clone(), |help| format!("{message}; {help}"))
    }

    /// Something in the request cannot be read.
    pub(crate) fn bad(message: impl Into<String>) -> Failure {
        Failure::new(StatusCode::BAD_REQUEST, "badRequest", message)
    }

    /// It can be read and is not possible.
    pub(crate) fn refused(code: &str, message: impl Into<String>) -> Failure {
        Failure::new(StatusCode::UNPROCESSABLE_ENTITY, code, message)
    }

    pub(crate) fn not_found(code: &str, message: impl Into<String>) -> Failure {
        Failure::new(StatusCode::NOT_FOUND, code, message)
    }

    /// It was possible before, or will be later.
    pub(crate) fn conflict(code: &str, message: impl Into<String>) -> Failure {
        Failure::new(StatusCode::CONFLICT, code, message)
    }

    pub(crate) fn too_large(message: impl Into<String>) -> Failure {
        Failure::new(StatusCode::PAYLOAD_TOO_LARGE, "tooLarge", message)
    }

    /// A mistake of the platform itself.
    pub(crate) fn internal(message: impl Into<String>) -> Failure {
        Failure::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", message)
            .help("this is a fault of the platform; the control plane's log may say more")
    }

    /// The disk failed while something was read or written.
    pub(crate) fn io(what: &str, error: &std::io::Error) -> Failure {
        if error.kind() == std::io::ErrorKind::StorageFull {
            return StoreError::Full(format!("{what}: {error}")).into();
        }
        Failure::internal(format!("{what}: {error}"))
    }

    /// What a request of the API's own types is wrong about.
    pub(crate) fn of(error: ApiError) -> Failure {
        Failure { status: StatusCode::BAD_REQUEST, error, missing: Vec::new() }
    }

    /// An environment that cannot be chosen.
    pub(crate) fn of_choice(error: ApiError) -> Failure {
        let status = match error.code.as_str() {
            "noSuchEnvironment" => StatusCode::NOT_FOUND,
            "environmentDeprecated" => StatusCode::UNPROCESSABLE_ENTITY,
            _ => StatusCode::BAD_REQUEST,
        };
        Failure { status, error, missing: Vec::new() }
    }

    pub(crate) fn missing(hashes: Vec<String>) -> Failure {
        let message = format!("the submission refers to objects that are not here ({})", hashes.len());
        let failure = Failure::conflict("missingObjects", message);
        Failure { missing: hashes, ..failure }.help("upload each with PUT /v1/objects/SHA256, then submit again")
    }

    pub(crate) fn help(mut self, help: impl Into<String>) -> Failure {
        self.error = self.error.help(help);
        self
    }
}

impl From<Unresolved> for Failure {
    fn from(Unresolved { error, passing }: Unresolved) -> Failure {
        // What passes is nobody's mistake.
        let status = if passing { StatusCode::BAD_GATEWAY } else { StatusCode::UNPROCESSABLE_ENTITY };
        Failure { status, error, missing: Vec::new() }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let Failure { status, mut error, missing } = self;
        error.message = mask(&error.message).into_owned();
        if missing.is_empty() {
            (status, Json(error)).into_response()
        } else {
            (status, Json(MissingObjects { error, missing })).into_response()
        }
    }
}

impl From<HandleError> for Failure {
    fn from(error: HandleError) -> Failure {
        match error {
            HandleError::Stopped => Failure::new(StatusCode::SERVICE_UNAVAILABLE, "stopping", error.to_string()),
            HandleError::Store(error) => error.into(),
        }
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Failure {
        let (status, code) = match &error {
            StoreError::Full(_) => (StatusCode::INSUFFICIENT_STORAGE, "storeFull"),
            StoreError::Fenced { .. } => (StatusCode::SERVICE_UNAVAILABLE, "fenced"),
            StoreError::Newer { .. } => (StatusCode::INTERNAL_SERVER_ERROR, "storeNewer"),
            StoreError::Failed(_) => (StatusCode::INTERNAL_SERVER_ERROR, "storeFailed"),
        };
        Failure::new(status, code, error.to_string())
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Failure {
        let message = refusal.to_string();
        match refusal {
            Refusal::NoSuchJob => Failure::conflict("jobEnded", message),
            Refusal::NoSuchNode(_) => Failure::not_found("noSuchNode", message),
            Refusal::NoSuchQueue { .. } => Failure::refused("noSuchQueue", message),
            Refusal::QueueDraining(_) => Failure::refused("queueDraining", message),
            Refusal::NeverFits(_) => Failure::refused("neverFits", message),
            Refusal::NoSuchPool(_) => Failure::not_found("noSuchPool", message),
            Refusal::NoSuchDrain(_) => Failure::not_found("noSuchDrain", message),
            Refusal::NotDrained(_) => Failure::conflict("notDrained", message),
            Refusal::NotSubmitter { .. } => Failure::new(StatusCode::FORBIDDEN, "notSubmitter", message),
            Refusal::PriorityTooHigh { queue, highest, asked } => {
                let name = |priority| priority_name(&Priorities::default(), priority);
                let (highest, asked) = (name(highest), name(asked));
                let message = format!("the highest priority of queue `{queue}` is {highest}, and {asked} was asked");
                Failure::refused("priorityTooHigh", message).help("ask for a lower one, or use another queue")
            }
            Refusal::NoSuchDependency(_) => Failure::refused("noSuchDependency", message),
            Refusal::DependencyFailed { .. } => Failure::refused("dependencyFailed", message),
            Refusal::NotWaiting { .. } => Failure::conflict("notWaiting", message),
            Refusal::TimeLimitPassed { .. } => Failure::refused("timeLimitPassed", message),
            Refusal::NoSuchParent { .. } => Failure::refused("noSuchParent", message),
            Refusal::QueueCycle { .. } => Failure::refused("queueCycle", message),
            Refusal::LimitBelowGuarantee { .. } => Failure::refused("limitBelowGuarantee", message),
            Refusal::GuaranteeAboveParent { .. } => Failure::refused("guaranteeAboveParent", message),
            Refusal::GuaranteeAboveLimit { .. } => Failure::refused("guaranteeAboveLimit", message),
            Refusal::QueueHasChildren { .. } => Failure::conflict("queueHasChildren", message),
            Refusal::QueueHasJobs { .. } => Failure::conflict("queueHasJobs", message),
            Refusal::LastQueue(_) => Failure::conflict("lastQueue", message),
            Refusal::BadDocument { .. } => Failure::refused("badDocument", message),
            Refusal::BadDrain(_) => Failure::refused("badDrain", message),
            Refusal::InDrain { .. } => Failure::conflict("inDrain", message),
        }
    }
}
