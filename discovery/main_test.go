package discovery

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/nametap/nametap/internal/testkit/wait"
)

func TestMain(m *testing.M) {
	wait.Together()
	code := m.Run()
	err := goleak.Find()
	for tries := 0; err != nil && tries < 100; tries++ { // the machine may be busy: each try takes a second
		err = goleak.Find()
	}
	if code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}
