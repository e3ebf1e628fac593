from tests.integrations.conftest import wheel as wheel
