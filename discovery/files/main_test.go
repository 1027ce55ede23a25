package files

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/nametap/nametap/internal/testkit/wait"
)

func TestMain(m *testing.M) {
	wait.Together()
	goleak.VerifyTestMain(m)
}
