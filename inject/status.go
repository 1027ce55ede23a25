package inject

import (
	"encoding/json"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
)

// Status is the annotation that lists, in JSON, what was added to a pod, and what the additions replaced.
const Status = "nametap.dev/status"

// A status is the value of the annotation. The zero value stands for a pod without nametap.
type status struct {
	Mode Mode `json:"mode"`
	// The containers and volumes that were added, by name. The value of a container is the result of the function marks
	// for the container that injection generated. The value of a volume is its mark.
	InitContainers   map[string]string `json:"initContainers"`
	Volumes          map[string]string `json:"volumes"`
	Sysctls          []string          `json:"sysctls,omitempty"`
	ImagePullSecrets []string          `json:"imagePullSecrets,omitempty"`
	// In mode Resolv, the domains of the cluster that were added to the search list, and the DNS fields that the pod
	// had before.
	ClusterSearches []string             `json:"clusterSearches,omitempty"`
	DNSPolicy       string               `json:"dnsPolicy,omitempty"`
	DNSConfig       *corev1.PodDNSConfig `json:"dnsConfig,omitempty"`
}

// parseStatus reads the annotation of a pod. A pod without it has the zero status.
func parseStatus(annotations map[string]string) (status, error) {
	text, ok := annotations[Status]
	if !ok {
		return status{}, nil
	}
	var s status
	err := json.Unmarshal([]byte(text), &s)
	if err == nil && string(writeJSON(s)) != text {
		err = errors.New("want no other keys, and the same form")
	}
	if err != nil {
		return status{}, fmt.Errorf("annotation %s: %.1000q: %w: this version of nametap did not write it; remove it together with what it lists", Status, text, err)
	}
	return s, nil
}

// addedContainer reports whether injection has added a container.
func (s *status) addedContainer(name string) bool {
	_, ok := s.InitContainers[name]
	return ok
}

// addedVolume reports whether injection has added a volume.
func (s *status) addedVolume(name string) bool {
	_, ok := s.Volumes[name]
	return ok
}
