package kube

import (
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// retry returns the pauses between failed requests: 0.5 s at first, and at most about 3 s. So the source has caught up
// five seconds after the API server is back.
func retry() *wait.Backoff {
	return &wait.Backoff{Duration: 500 * time.Millisecond, Factor: 1.5, Jitter: 0.2, Steps: 100, Cap: 2500 * time.Millisecond}
}
