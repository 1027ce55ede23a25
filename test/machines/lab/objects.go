package lab

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// An Object is one of the API server's.
type Object struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Metadata   struct {
		Name      string `json:"name"`
		Namespace string `json:"namespace"`
		UID       string `json:"uid"`
	} `json:"metadata"`
	Status json.RawMessage `json:"status"`

	Text string `json:"-"` // in YAML
}

// Parse returns the objects of YAML documents.
func (c *Cluster) Parse(text string) []Object {
	c.TB.Helper()
	var objects []Object
	for document := range strings.SplitSeq("\n"+text, "\n---") {
		o := Object{Text: document}
		if err := yaml.Unmarshal([]byte(document), &o); err != nil {
			c.TB.Fatalf("%v\n%s", err, document)
		}
		if o.Kind != "" {
			objects = append(objects, o)
		}
	}
	return objects
}

// path returns the object's path at the API server.
func (o Object) path() string {
	path := "/apis/" + o.APIVersion
	if !strings.Contains(o.APIVersion, "/") {
		path = "/api/" + o.APIVersion
	}
	if o.Metadata.Namespace != "" {
		path += "/namespaces/" + o.Metadata.Namespace
	}
	kind, plural := strings.ToLower(o.Kind), "s"
	switch {
	case kind == "endpoints":
		plural = ""
	case strings.HasSuffix(kind, "y"):
		kind, plural = strings.TrimSuffix(kind, "y"), "ies"
	}
	return path + "/" + kind + plural + "/" + o.Metadata.Name
}

// Apply creates or changes the objects of YAML documents, also fields that another program has set, and their status if
// they have one.
func (c *Cluster) Apply(text string) {
	c.TB.Helper()
	if err := c.TryApply(text); err != nil {
		c.TB.Fatal(err)
	}
}

// TryApply is like Apply and returns why the API server refuses an object.
func (c *Cluster) TryApply(text string) (refused error) {
	c.TB.Helper()
	for _, o := range c.Parse(text) {
		paths := []string{o.path()}
		if o.Status != nil {
			paths = append(paths, o.path()+"/status")
		}
		for _, path := range paths {
			// The API server needs a moment to serve a new kind of objects.
			wait.Until(c.TB, path+" can be applied", func() bool {
				status, answer := c.Request(http.MethodPatch, path+"?fieldManager=lab&force=true", "application/apply-patch+yaml", []byte(o.Text))
				if status >= http.StatusBadRequest && status != http.StatusNotFound {
					refused = fmt.Errorf("%s: status %d: %s", path, status, answer)
				}
				return status != http.StatusNotFound && status != 0
			})
			if refused != nil {
				return refused
			}
		}
	}
	return nil
}

// Remove deletes the objects of YAML documents.
func (c *Cluster) Remove(text string) {
	c.TB.Helper()
	for _, o := range c.Parse(text) {
		if err := c.Do(http.MethodDelete, o.path()+"?gracePeriodSeconds=0", nil, nil); err != nil {
			c.TB.Fatal(err)
		}
	}
}

// Get reads the object at a path into result, and fails the test if it is missing.
func (c *Cluster) Get(path string, result any) {
	c.TB.Helper()
	if err := c.Do(http.MethodGet, path, nil, result); err != nil {
		c.TB.Fatal(err)
	}
}

// ErrAbsent is the error for an object that does not exist.
var ErrAbsent = errors.New("the object does not exist")

// Do sends a request with a body in JSON, unless in is nil, and reads the answer into out, unless out is nil; into a
// *string as it is. An error has the API server's message.
func (c *Cluster) Do(method, path string, in, out any) error {
	var body []byte
	if in != nil {
		var err error
		if body, err = json.Marshal(in); err != nil {
			return err
		}
	}
	status, answer := c.Request(method, path, "application/json", body)
	switch {
	case status == http.StatusNotFound:
		return fmt.Errorf("%s %s: %w", method, path, ErrAbsent)
	case status < http.StatusOK || status >= http.StatusMultipleChoices:
		var why struct{ Message string }
		if json.Unmarshal(answer, &why) != nil || why.Message == "" {
			why.Message = strings.TrimSpace(string(answer))
		}
		return fmt.Errorf("%s %s: status %d: %s", method, path, status, why.Message)
	}
	switch out := out.(type) {
	case nil:
		return nil
	case *string:
		*out = string(answer)
		return nil
	}
	if err := json.Unmarshal(answer, out); err != nil {
		return fmt.Errorf("%s %s: %w: %s", method, path, err, answer)
	}
	return nil
}

// Request sends a request and returns the status and the body of the answer. The status is 0 if the API server does not
// answer.
func (c *Cluster) Request(method, path, contentType string, body []byte) (status int, answer []byte) {
	request, err := http.NewRequest(method, "https://"+APIAddr+path, bytes.NewReader(body))
	if err != nil {
		return 0, []byte(err.Error())
	}
	request.Header.Set("Authorization", "Bearer "+AdminToken)
	if body != nil {
		request.Header.Set("Content-Type", contentType)
	}
	response, err := c.client.Do(request)
	if err != nil {
		return 0, []byte(err.Error())
	}
	defer response.Body.Close()
	if answer, err = io.ReadAll(response.Body); err != nil {
		return 0, []byte(err.Error())
	}
	return response.StatusCode, answer
}
