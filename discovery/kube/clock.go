package kube

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"k8s.io/client-go/rest"
)

// clockTolerance is how much the clocks of machines may differ.
const clockTolerance = 5 * time.Minute

// checkClock returns an error if the clocks of this machine and of the API server differ by more than
// clockTolerance. Each response of the API server has the server's time (RFC 9110, section 6.6.1).
func checkClock(ctx context.Context, client *rest.RESTClient) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, client.Get().AbsPath("/version").URL().String(), http.NoBody)
	if err != nil {
		return err
	}
	// Round removes the reading of the monotonic clock, which stops while the machine is suspended.
	before := time.Now().Round(0)
	response, err := client.Client.Do(request)
	if err != nil {
		return fmt.Errorf("the API server cannot be asked for its time: %w", err)
	}
	after := time.Now().Round(0)
	_ = response.Body.Close() // it is not read
	said, err := http.ParseTime(response.Header.Get("Date"))
	if err != nil {
		return nil // a proxy has removed the time
	}
	ahead, relation := before.Sub(said), "ahead of"
	if behind := said.Sub(after); behind > 0 {
		ahead, relation = behind, "behind"
	}
	if ahead <= clockTolerance {
		return nil
	}
	return fmt.Errorf("the clock of this machine is %v %s the one of the API server: set the clocks of the nodes", ahead.Round(time.Minute), relation)
}
